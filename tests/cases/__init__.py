"""Small models with what must hold of them, one a line (`bundled.jsonl`), and the runner that holds them up to it."""

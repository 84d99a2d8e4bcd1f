"""The plan as a page: what is on it, and in a real browser, where there is one, that it folds, fits and can be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar3d
from autopar3d.errors import PlanError
from autopar3d.page.style import AXIS_COLOURS, STYLE
from autopar3d.plan import Plan
from autopar3d.timelines.recording import COLOURS

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""


class Parsed(HTMLParser):
    """Checks that tags nest, and keeps what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "rect", "circle", "polygon", "polyline") or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def count(self, tag: str) -> int:
        return sum(t == tag for t, _ in self.tags)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.head = nn.Linear(16, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar3d.plan(Model(), "auto", torch.ones(16, 16), world_size=8, scheme="auto")


@pytest.fixture(scope="module")
def cube() -> Plan:
    return autopar3d.plan(Model(), (2, 2, 2), torch.ones(16, 16), scheme="3d")


def test_everything_is_on_the_page(plan: Plan, tmp_path: Path) -> None:
    html = plan.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == html
    page = Parsed(html)
    headings = {attrs["id"] for tag, attrs in page.tags if tag == "h2"}
    assert headings == {"grid", "model", "timeline", "memory", "sent", "grids", "notes"}
    # A module is a fold, and every parameter is in one.
    assert page.count("details") == page.count("summary") == 1 + 1 + 2 + 4 + 1
    for parameter in plan.parameters:
        assert parameter.layout in page.text and " × ".join(map(str, parameter.local_shape)) in page.text
    labels = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert len(labels) == 3 and labels[0] == f"a grid of {' x '.join(map(str, plan.grid))} devices"
    assert all(" × ".join(map(str, c.grid)) in page.text and c.why in page.text for c in plan.candidates)
    # Self-contained: nothing is fetched, nothing runs.
    assert not page.count("script") and not page.count("link") and not page.count("img")
    assert not re.search(r"https?://|url\(|@import", html)


def test_each_axis_is_told_what_it_does(cube: Plan) -> None:
    page = Parsed(cube.to_html())
    assert "gathers inputs" in page.text and "gathers weights" in page.text and "reduces results" in page.text
    for axis in "xyz":
        sent = sum(n for (a, _), n in cube.bytes.items() if a == axis)
        assert sent and f"{cube.calls[axis]} calls" in page.text
    spans = [attrs for tag, attrs in page.tags if tag == "rect"]
    assert cube.timeline is not None and 0 < len(spans) <= len(cube.timeline.spans)
    assert all(float(s["x"] or 0) + float(s["width"] or 0) <= 1001 for s in spans)


def test_names_are_escaped(cube: Plan) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<b>&", nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, "<b>&")(x)

    html = autopar3d.plan(Odd(), (2, 1, 1), torch.ones(8, 8)).to_html()
    Parsed(html)
    assert "&lt;b&gt;&amp;" in html and "<b>&" not in html


def test_in_notebooks_and_from_files(cube: Plan, tmp_path: Path) -> None:
    fragment = Parsed(cube._repr_html_())
    assert "blocks.0-1.0.weight (x2)" in fragment.text and "blocks.1.0.weight" not in fragment.text
    assert fragment.count("table") == 2 and fragment.count("html") == 0
    cube.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert "has no timeline" in Parsed(loaded.to_html()).text
    with pytest.raises(PlanError, match="has no timeline"):
        loaded.plot_memory(tmp_path / "m.png")


def test_memory_as_a_picture(cube: Plan, tmp_path: Path) -> None:
    cube.plot_memory(tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
TOLD_APART = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}


def _contrast(one: str, other: str) -> float:
    """As WCAG 2 has it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_colours_can_be_read_and_told_apart(cube: Plan) -> None:
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in STYLE.split("@media")]
    assert len(themes) == 2 and all(set(t) == {"ink", "faint", "line", "ground", "panel", "curve"} for t in themes)
    for theme in themes:
        for letters in ("ink", "faint"):
            assert min(_contrast(theme[letters], theme[ground]) for ground in ("ground", "panel")) >= 4.5
        assert _contrast(theme["curve"], theme["ground"]) >= 3
    for colours in (AXIS_COLOURS, COLOURS):
        assert len(set(colours.values())) == len(colours) and {c.upper() for c in colours.values()} <= TOLD_APART
    ids = [attrs["id"] for _, attrs in Parsed(cube.to_html()).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


# -- in a browser ----------------------------------------------------------------------------------------------------

_LOOK = """
<script>
const errors = [];
window.onerror = (m) => errors.push(String(m));
for (const name of ["error", "warn"]) console[name] = (...m) => errors.push(m.join(" "));
window.onload = () => {
  const folds = [...document.querySelectorAll("details")], inner = folds[folds.length - 1];
  const root = folds[0], shown = (e) => e.getBoundingClientRect().height > 0;
  const rgb = (s) => s.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const light = (c) => rgb(c).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  const ground = light(getComputedStyle(document.body).backgroundColor);
  let contrast = 99;
  for (const e of document.querySelectorAll("h1, h2, td, th, p, summary, .ap3d-sum")) {
    const ink = light(getComputedStyle(e).color);
    contrast = Math.min(contrast, (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05));
  }
  const before = shown(inner);
  root.querySelector("summary").click();
  const folded = !root.open;
  const hidden = !inner.checkVisibility();
  root.querySelector("summary").click();
  const letters = [...document.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height);
  document.body.innerHTML = "<pre id='seen'>" + JSON.stringify({
    errors, before, folded, hidden, unfolded: root.open, contrast, dark: ground < .2, letters: Math.min(...letters),
    wide: document.documentElement.scrollWidth, inner: window.innerWidth, folds: folds.length,
  }) + "</pre>";
};
</script>
"""


@pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (800, True)])
def test_in_a_browser(plan: Plan, tmp_path: Path, width: int, dark: bool) -> None:
    html = plan.to_html()
    (tmp_path / "plan.html").write_text(html.replace("</head>", _LOOK + "</head>"), encoding="utf-8")
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    words += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=2000"]
    words += ["--blink-settings=preferredColorScheme=0", "--force-dark-mode"] if dark else []
    done = subprocess.run([*words, "--dump-dom", (tmp_path / "plan.html").as_uri()], capture_output=True, text=True)
    found = re.search(r"<pre id=\"seen\">(.*?)</pre>", done.stdout)
    assert found, done.stderr[-2000:]
    seen = json.loads(found[1])
    assert seen["errors"] == [] and seen["folds"] == html.count("<details")
    assert seen["before"] and seen["folded"] and seen["hidden"] and seen["unfolded"]
    assert seen["dark"] == dark and seen["contrast"] >= 4.5
    assert seen["wide"] <= seen["inner"] <= width and seen["letters"] >= 9

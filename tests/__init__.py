"""The tests, mirroring the source; a package, so that ranks started by a test can import its functions."""

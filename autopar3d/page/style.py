"""How the page looks: light and dark after the reader's setting, and colours that people with any kind of colour
blindness can tell apart (Okabe and Ito's)."""

AXIS_COLOURS = {"r": "#CC79A7", "x": "#E69F00", "y": "#009E73", "z": "#56B4E9"}

# All names begin with ap3d, for the page's table also stands in notebooks, among other people's styles.
STYLE = """
.ap3d { --ink: #1b1f24; --faint: #57606a; --line: #d0d7de; --ground: #ffffff; --panel: #f6f8fa; --curve: #0072B2;
  font: 14px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink); background: var(--ground); }
@media (prefers-color-scheme: dark) {
  .ap3d { --ink: #e6edf3; --faint: #9da7b1; --line: #3d444d; --ground: #0d1117; --panel: #161b22;
  --curve: #56B4E9; } }
.ap3d h1 { font-size: 22px; margin: 0 0 4px } .ap3d h2 { font-size: 17px; margin: 28px 0 8px }
.ap3d p { margin: 4px 0 8px } .ap3d .ap3d-faint { color: var(--faint) }
.ap3d .ap3d-tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 12px 0 }
.ap3d .ap3d-tile { border: 1px solid var(--line); border-radius: 6px; padding: 6px 12px; background: var(--panel) }
.ap3d .ap3d-tile b { display: block; font-size: 17px; font-variant-numeric: tabular-nums }
.ap3d .ap3d-wide { overflow-x: auto }
.ap3d table { border-collapse: collapse; font-variant-numeric: tabular-nums; color: inherit; background: none }
.ap3d th, .ap3d td { text-align: left; padding: 3px 12px 3px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); color: inherit; background: none }
.ap3d th { font-weight: 600; color: var(--faint) } .ap3d td.ap3d-n, .ap3d th.ap3d-n { text-align: right }
.ap3d td.ap3d-n { white-space: nowrap }
.ap3d code { font: 13px/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere }
.ap3d .ap3d-cube { display: flex; flex-wrap: wrap; gap: 24px; align-items: center }
.ap3d svg { display: block; max-width: 100% } .ap3d svg text { fill: var(--ink); font-size: 12px }
.ap3d svg.ap3d-timeline text, .ap3d svg.ap3d-memory text { font-size: 14px }
.ap3d svg .ap3d-faint { fill: var(--faint) }
.ap3d details { border-left: 1px solid var(--line); margin-left: 6px; padding-left: 12px }
.ap3d summary { cursor: pointer; padding: 2px 0 } .ap3d summary:hover { background: var(--panel) }
.ap3d .ap3d-sum { color: var(--faint); font-variant-numeric: tabular-nums; margin-left: 8px }
.ap3d .ap3d-key { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 }
.ap3d .ap3d-key i { display: inline-block; width: 12px; height: 12px; margin-right: 5px;
  border: 1px solid var(--line) }
.ap3d .ap3d-bar { background: #0072B2; height: 10px; min-width: 1px }
.ap3d .ap3d-wait { background: #E69F00; height: 10px }
.ap3d .ap3d-bars { display: flex; width: 160px }
"""

"""The style sheet of a report: light and dark, from a phone to a wide screen, no font and no script to fetch."""

CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --soft: #5b6675; --line: #dfe3e9;
  --first: #0b6bb3; --second: #c2410c; --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --page: #11151b; --card: #1a2029; --ink: #e8ecf1; --soft: #9aa6b5;
  --line: #2c3541; --first: #5fb3f0; --second: #fb923c; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Noto Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 48px; }
header h1 { font-size: 1.6rem; line-height: 1.2; margin: 8px 0 4px; overflow-wrap: anywhere; }
header p, .note { color: var(--soft); margin: 4px 0; }
h2 { font-size: 1.15rem; margin: 34px 0 4px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 10px; margin: 18px 0; }
.tile, figure, .panel, .sample { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.25; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tile span { display: block; color: var(--soft); font-size: .86rem; line-height: 1.35; margin-top: 2px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 14px; }
figure { margin: 10px 0 0; padding: 14px; min-width: 0; container-type: inline-size; }
figcaption { font-weight: 600; margin-bottom: 6px; }
figcaption small { display: block; font-weight: 400; color: var(--soft); font-size: .86rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11.5px system-ui, sans-serif; fill: var(--soft); }
@container (max-width: 400px) { svg text { font-size: 14.5px; } }
svg text.second { fill: var(--second); } svg text.first { fill: var(--first); }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .line.first { stroke: var(--first); }
.line.second { stroke: var(--second); } .line.ideal { stroke: var(--soft); stroke-dasharray: 5 4; stroke-width: 1.2; }
.dot.first, .bar.first { fill: var(--first); } .dot.second, .bar.second { fill: var(--second); } .dot { fill-opacity: .85; }
.mark { stroke: var(--second); stroke-dasharray: 4 3; } .mark.first { stroke: var(--first); }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; margin-top: 10px; }
.sample { padding: 10px; font-size: .86rem; overflow-wrap: anywhere; min-width: 0; }
.sample img, .sample .blank { width: 100%; height: 104px; object-fit: contain; border-radius: 6px; background: var(--page);
  display: grid; place-items: center; color: var(--soft); margin-bottom: 6px; }
.sample img.small { image-rendering: pixelated; }
.sample .id { color: var(--soft); }
.was { color: var(--bad); font-weight: 600; } .now { color: var(--good); font-weight: 600; }
.panel { padding: 4px 14px; margin-top: 10px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: 6px 20px 6px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.wrap { white-space: normal; overflow-wrap: anywhere; min-width: 160px; }
.work { margin: 8px 0; padding-left: 20px; } .work li { margin: 2px 0; }
code { font: .86em ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: .86rem; margin-top: 40px; border-top: 1px solid var(--line); padding-top: 12px; }
@media (max-width: 480px) { main { padding: 12px 12px 36px; } .samples { grid-template-columns: repeat(2, 1fr); }
  header h1 { font-size: 1.35rem; } .tiles { grid-template-columns: repeat(2, 1fr); } .panel { padding: 4px 10px; }
  table { font-size: .8rem; } th, td { padding: 6px 9px 6px 0; white-space: normal; } td.wrap { min-width: 0; }
  th:last-child, td:last-child { padding-right: 0; } }
@media print { body { background: #fff; } figure, .sample, .tile { break-inside: avoid; } }
"""

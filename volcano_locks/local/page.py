"""The operators' page: rows of the store become HTML.

The law of this module: it renders, and reads nothing itself. Every text that came from outside is
escaped here, in one place. No script is needed to read the page or to use it; the one that there is
only swaps in what the server sends, so what is seen live and what is seen without it cannot differ.
A swap takes nothing from who reads: what has the focus, is open or scrolls has an id and is found again
by it, and selected text stays until it is let go.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from ..contract import format_instant, from_milliseconds
from .quota import WINDOW_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .quota import Usage
    from .store import LockRow, TenureRow

__all__ = ["View", "confirmation", "live", "page"]

TIMELINE_MS: Final = 10 * 60 * 1_000
"""How far back the timeline reaches: ten minutes."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fdfdfc; --soft: #5b6470; --line: #d5d9de;
  --held: #0b6e4f; --past: #7c8ea3; --forced: #b3261e; --accent: #0a58a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --paper: #15181c; --soft: #a3adb8;
  --line: #3a414a; --held: #4cc38a; --past: #7688a0; --forced: #ff8a80; --accent: #7ab8ff; } }
* { box-sizing: border-box }
body { font: 1rem/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 0 auto; max-width: 72rem; padding: 1rem 1.25rem 3rem }
h1 { font-size: 1.4rem; margin: .5rem 0 } h2 { font-size: 1.1rem; margin: 1.75rem 0 .5rem }
.soft { color: var(--soft); font-weight: normal } time, td a { white-space: nowrap }
.scroll { overflow-x: auto; position: relative }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
th[scope=row] { min-width: 12rem } h1, p, button, th[scope=row] { overflow-wrap: anywhere }
code { font: .95em ui-monospace, monospace }
svg { display: block } svg.bar { width: 8rem; height: .6rem; margin-top: .3rem }
.track { fill: var(--line) } .held { fill: var(--held) } .past { fill: var(--past) }
.forced { fill: var(--forced) } text { fill: var(--ink); font: 12px ui-monospace, monospace }
.tick { stroke: var(--line) }
a { color: var(--accent) } a:focus-visible, button:focus-visible, summary:focus-visible {
  outline: 3px solid var(--accent); outline-offset: 2px }
button { font: inherit; padding: .4rem .9rem; border: 1px solid var(--forced); color: var(--paper);
  background: var(--forced); border-radius: .3rem; cursor: pointer }
.skip { position: absolute; left: -99rem } .skip:focus { left: 1rem }
.visually-hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
"""

_SCRIPT: Final = """
const [live, news, state] = ["live", "news", "state"].map(id => document.getElementById(id));
// Not SVG's own <animate>: Chromium does not start it in what is put in later.
const runDown = () => live.querySelectorAll("[data-left]").forEach(bar => bar.animate(
  { transform: ["scaleX(1)", "scaleX(0)"] }, { duration: Number(bar.dataset.left), fill: "forwards" }));
runDown();
const source = new EventSource("events");
source.addEventListener("view", event => {
  const selection = getSelection();
  if (selection.type === "Range" && selection.getRangeAt(0).intersectsNode(live)) {
    state.textContent = "Paused while text is selected.";
    return;
  }
  const focused = document.activeElement && document.activeElement.id;
  const open = [...live.querySelectorAll("details[open]")].map(item => item.id);
  const left = [...live.querySelectorAll(".scroll")].map(item => [item.id, item.scrollLeft]);
  live.innerHTML = event.data;
  runDown();
  state.textContent = "Live.";
  open.forEach(id => { const item = document.getElementById(id); if (item) item.open = true; });
  if (focused && document.activeElement.id !== focused) {
    const item = document.getElementById(focused); if (item) item.focus({ preventScroll: true });
  }
  left.forEach(([id, x]) => { const item = document.getElementById(id); if (item) item.scrollLeft = x; });
});
source.addEventListener("news", event => { news.textContent = event.data; });
source.onerror = () => { state.textContent = "Connection lost; trying again."; };
"""


@dataclass(frozen=True)
class View:
    """What the page shows, read at one instant. ``now``: milliseconds by the service's clock."""

    now: int
    quota: int
    locks: Sequence[LockRow]
    tenures: Sequence[TenureRow]
    usages: dict[str, Usage]

    def of(self, project: str) -> View:
        """The same instant, as far as it is that project's."""
        return View(
            self.now,
            self.quota,
            [row for row in self.locks if row.project == project],
            [term for term in self.tenures if term.project == project],
            {name: usage for name, usage in self.usages.items() if name == project},
        )

    def held(self) -> list[LockRow]:
        return [row for row in self.locks if not row.record.free(self.now)]

    def gist(self) -> object:
        """Equal as long as nobody would see a difference but the passing of time."""
        held = [(row.project, row.key) for row in self.held()]
        return (
            held,
            [(row, row.contended) for row in self.locks],
            list(self.tenures),
            self.usages,
        )


def page(view: View, nonce: str) -> str:
    """The whole page; ``nonce`` is that of the response's Content-Security-Policy."""
    return _document(
        "Locks",
        f"""<a class="skip" href="#live">To the locks</a>
<header><h1>volcano-locks: local lock service</h1>
<p class="soft"><span id="state">As of loading; reload for news.</span>
 The contract is at <a href="openapi.json">openapi.json</a>.</p></header>
<p id="news" role="status" class="visually-hidden"></p>
<main id="live">{live(view)}</main>
<script nonce="{escape(nonce)}">{_SCRIPT}</script>""",
        nonce,
    )


def live(view: View) -> str:
    """The part of the page that changes."""
    return "\n".join(
        [
            f'<p class="soft">As of {_instant(view.now)} UTC</p>',
            _locks(view),
            _timeline(view),
            _usage(view),
        ]
    )


def confirmation(project: str, key: str, row: LockRow | None, csrf: str, nonce: str) -> str:
    """The question before a force release: what it breaks, and a button that does it."""
    holder = (
        "Nobody holds it at the moment."
        if row is None
        else f"It is held with the fencing token <code>{row.record.fencing_token}</code> "
        f"until {_instant(row.record.expires_at)} UTC."
    )
    return _document(
        "Force release",
        f"""<main><h1>Force release of <code>{escape(key)}</code></h1>
<p>Project <code>{escape(project)}</code>. {holder}</p>
<p><strong>This breaks mutual exclusion.</strong> The holder is not told: it works on until its next
renewal fails, while somebody else can lead at once. Only writes that carry the fencing token are
protected then. Do it if the holder is certainly dead, or if waiting for the expiry is worse.</p>
<form method="post" action="force-release">
<input type="hidden" name="project" value="{escape(project)}">
<input type="hidden" name="key" value="{escape(key)}">
<input type="hidden" name="csrf" value="{escape(csrf)}">
<p><button type="submit">Force release {escape(key)}</button></p>
<p><a href="./">Keep it, back to the locks</a></p></form></main>""",
        nonce,
    )


def _document(title: str, body: str, nonce: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - volcano-locks</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style nonce="{escape(nonce)}">{_STYLE}</style></head><body>
{body}
</body></html>
"""


def _locks(view: View) -> str:
    if not view.locks:
        return "<h2>Locks</h2><p>No lock has been taken yet.</p>"
    hand_overs: dict[tuple[str, str], int] = {}
    for term in view.tenures:
        where = term.project, term.key
        hand_overs[where] = hand_overs.get(where, 0) + 1
    ordered = sorted(view.locks, key=lambda row: (row.record.free(view.now), row.project, row.key))
    rows = "\n".join(_lock(row, view.now, hand_overs) for row in ordered)
    return f"""<h2>Locks</h2><div id="locks" class="scroll" tabindex="0" role="region" aria-label="Locks"><table>
<caption class="visually-hidden">All locks, held ones first</caption>
<thead><tr><th scope="col">Lock</th><th scope="col">State</th><th scope="col">Since (UTC)</th>
<th scope="col">Until (UTC)</th><th scope="col" class="number">Fencing token</th>
<th scope="col" class="number">Terms in 10 min</th><th scope="col" class="number">Refused acquires</th>
<th scope="col">Action</th></tr></thead>
<tbody>{rows}</tbody></table></div>"""


def _lock(row: LockRow, now: int, hand_overs: dict[tuple[str, str], int]) -> str:
    record = row.record
    name = f'<th scope="row"><code>{escape(row.key)}</code><br><span class="soft">{escape(row.project)}</span></th>'
    counts = f"""<td class="number"><code>{record.fencing_token}</code></td>
<td class="number">{hand_overs.get((row.project, row.key), 0)}</td>
<td class="number">{row.contended}</td>"""
    if record.free(now):
        return f"<tr>{name}<td>free</td><td>-</td><td>-</td>{counts}<td>-</td></tr>"
    state = "held" if now < record.expires_at else "lapsed, free in a second"
    identity = escape(f"release-{row.project}/{row.key}")
    query = escape(urlencode({"project": row.project, "key": row.key}))
    return f"""<tr>{name}<td>{state}</td><td>{_instant(record.acquired_at)}</td>
<td>{_instant(record.expires_at)}{_bar(now, record.expires_at, record.acquired_at)}</td>{counts}
<td><a id="{identity}" href="force-release?{query}">Force release<span class="visually-hidden">
 of {escape(row.key)}</span></a></td></tr>"""


def _bar(now: int, until: int, since: int) -> str:
    """What is left of the lease; the page's script lets it run down."""
    left = max(0, until - now)
    part = 100 * left / max(1, until - since, left)
    return f"""<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img"
 aria-label="{left / 1_000:.0f} seconds left"><rect class="track" width="100" height="6"/>
<rect class="held" width="{part:.2f}" height="6" data-left="{left}"/></svg>"""


def _timeline(view: View) -> str:
    start = view.now - TIMELINE_MS
    wheres = sorted({(term.project, term.key) for term in view.tenures})
    lanes = {where: index for index, where in enumerate(wheres)}
    current = {(row.project, row.key): row.record for row in view.locks}
    if not lanes:
        return "<h2>Hand-overs</h2><p>None in the last ten minutes.</p>"
    width, lane, label = 960, 26, 220
    parts, rows = [], []
    for minute in range(11):
        x = label + (width - label) * minute / 10
        parts.append(
            f'<line class="tick" x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{lane * len(lanes)}"/>'
        )
    for where, index in lanes.items():
        y = index * lane
        shown = where[1] if len(where[1]) <= 26 else f"{where[1][:25]}…"
        parts.append(f'<text x="0" y="{y + 17}">{escape(shown)}</text>')
    for term in view.tenures:
        end = term.ended
        if end is None:
            record = current.get((term.project, term.key))
            end = view.now if record is None else min(view.now, record.expires_at)
        ending = term.ending or ("held" if end >= view.now else "expired")
        look = {"held": "held", "forced": "forced"}.get(ending, "past")
        y = lanes[term.project, term.key] * lane
        scale = (width - label) / TIMELINE_MS
        x = label + max(0, term.started - start) * scale
        wide = max(2.0, (end - max(start, term.started)) * scale)
        told = f"{term.key}: token {term.fencing_token}, {_plain(term.started)} to {_plain(end)}, {ending}"
        parts.append(
            f'<rect class="{look}" x="{x:.1f}" y="{y + 5}" width="{wide:.1f}" height="16" rx="2">'
            f"<title>{escape(told)}</title></rect>"
        )
        rows.append((term, end, ending))
    return f"""<h2>Hand-overs</h2>
<div id="timeline" class="scroll" tabindex="0" role="region" aria-label="Timeline of hand-overs"><svg
 viewBox="0 0 {width} {lane * len(lanes) + 4}" width="{width}" role="img"
 aria-label="Terms of the last ten minutes, one lane for each lock; the table below says the same">
{"".join(parts)}</svg></div>
<p class="soft">Ten minutes, now at the right. Green: held; red: ended by force.</p>
<details id="terms"><summary id="terms-summary">The same as a table</summary>{_terms(rows)}</details>"""


def _terms(rows: Iterable[tuple[TenureRow, int, str]]) -> str:
    body = "\n".join(
        f'<tr><th scope="row"><code>{escape(term.key)}</code></th>'
        f'<td class="number"><code>{term.fencing_token}</code></td>'
        f"<td>{_instant(term.started)}</td><td>{_instant(end)}</td><td>{escape(ending)}</td></tr>"
        for term, end, ending in reversed(list(rows)[-200:])
    )
    return f"""<div id="terms-table" class="scroll"><table><thead><tr><th scope="col">Lock</th>
<th scope="col" class="number">Fencing token</th><th scope="col">From (UTC)</th><th scope="col">To (UTC)</th>
<th scope="col">Ending</th></tr></thead><tbody>{body}</tbody></table></div>"""


def _usage(view: View) -> str:
    window = view.now // WINDOW_MS
    rows = []
    for project, usage in sorted(view.usages.items()):
        used, refused = (usage.used, usage.refused) if usage.window == window else (0, 0)
        part = 100 * min(1.0, used / max(1, view.quota))
        rows.append(
            f'<tr><th scope="row"><code>{escape(project)}</code></th>'
            f'<td>{used} of {view.quota}<svg class="bar" viewBox="0 0 100 6" aria-hidden="true" '
            f'preserveAspectRatio="none"><rect class="track" width="100" height="6"/>'
            f'<rect class="held" width="{part:.1f}" height="6"/></svg></td>'
            f'<td class="number">{refused}</td></tr>'
        )
    if not rows:
        return ""
    return f"""<h2>Operations in this minute</h2><div id="usage" class="scroll"><table><thead><tr>
<th scope="col">Project</th><th scope="col">Used</th><th scope="col" class="number">Refused</th></tr>
</thead><tbody>{"".join(rows)}</tbody></table></div>"""


def _plain(milliseconds: int) -> str:
    return format_instant(from_milliseconds(milliseconds // 1_000 * 1_000))


def _instant(milliseconds: int) -> str:
    text = _plain(milliseconds)
    return f'<time datetime="{text}">{text[:10]} {text[11:-1]}</time>'

"""`Prompts`: the prompt of a call in exact ids.

Every agent resends its whole history, changed: arguments re-serialised, white space trimmed, reasoning dropped, parallel
calls split. A renderer that tokenised that text again would give other ids than the model sampled. So the gate finds the
call that a request goes on from (`Call.continues`), its ids come from the trajectory, and only what is new is rendered.
Where a request goes on from nothing, or the renderer cannot prove the bridge, the prompt is rendered in full and the reason
is kept. Some agents edit what the model said (a `cd` before a command is gone): the answer stays as it was sampled, found by
its tool-call ids, unless `history="strict"`. Nothing of a rollout is held here.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

import msgspec

from rollyard.core.call import Call, Continuation, PromptSource
from rollyard.core.errors import ConfigError
from rollyard.policy.renderers.protocol import Renderer, SampledTurn, Unbridgeable

Check = Literal["never", "always"]
EditedHistory = Literal["keep", "strict"]


class Prompts:
    """Prompts for all rollouts of one policy. `check="always"` renders in full beside each bridge and counts where the two
    differ, and changes nothing. `history="strict"` starts a new branch where an agent edited an answer, so that the model
    reads what the agent sent."""

    def __init__(self, renderer: Renderer, *, check: Check = "never", history: EditedHistory = "keep") -> None:
        if history not in get_args(EditedHistory):
            raise ConfigError(f"not a way to treat an edited history: {history!r}", hint="keep or strict")
        self.renderer = renderer
        self.check = check
        self.history = history
        self.counts: Counter[str] = Counter()

    def prepare(self, call: Call) -> Call:
        """The call with `prompt_ids`, where they came from, and why they could not be bridged when they were not."""
        parent = call.continues
        if parent is None:
            return self._render(call, call.fork_reason or "new_root")
        if parent.edited and self.history == "strict":
            return self._render(call, "assistant_rewritten")
        return self._bridge(call, parent) or self._render(call, "bridge_unproven")

    def _bridge(self, call: Call, parent: Continuation) -> Call | None:
        if parent.deltas is None or not parent.new:
            self.counts["unproven:unknown_ids" if parent.new else "unproven:nothing_new"] += 1
            return None
        prompt = parent.ids()
        end = len(prompt)
        start = end - parent.sampled
        turn = SampledTurn(prompt, start, prompt[start:], parent.answer)
        try:
            bridged = self.renderer.bridge(turn, parent.new, call.tools)
        except Unbridgeable as refusal:
            self.counts[f"unproven:{refusal.reason}"] += 1
            return None
        prompt.extend(bridged.ids)
        source: PromptSource = "bridged_by_id" if parent.edited else "bridge"
        self.counts[source] += 1
        if self.check == "always":
            same = self.renderer.render(call.messages, call.tools) == prompt
            self.counts["check:same" if same else "check:differs"] += 1
        inserted = tuple((end + a, end + b) for a, b in bridged.inserted)
        return msgspec.structs.replace(call, prompt_ids=prompt, prompt_source=source, inserted=inserted)

    def _render(self, call: Call, reason: str) -> Call:
        prompt = self.renderer.render(call.messages, call.tools)
        self.counts[f"render:{reason}"] += 1
        why = None if reason == "new_root" else reason
        return msgspec.structs.replace(call, prompt_ids=prompt, prompt_source="render", break_reason=why)

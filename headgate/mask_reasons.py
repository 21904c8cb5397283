"""The reasons for which sampled tokens are masked: what causes each, and what a user does about it. Pure.

The gateway reports them of calls and episodes, the trainer of batches.
"""

from __future__ import annotations

REMEDIES = {
    "greedy": "temperature 0 draws no tokens: request a temperature above 0, or set [sampling] temperature = { override = 1.0 }",
    "truncated": "top_p, top_k or min_p cut the distribution: record what they keep ([models.NAME] kept_tokens), leave them"
    " out of requests, or set [sampling] top_p = { override = 1.0 } if it is top_p",
    "constrained": "a grammar, a forced tool, a penalty, min_tokens or a bias shaped the tokens: leave response_format,"
    " tool_choice, penalties, min_tokens and logit_bias out of requests",
    "invalid_logprob": "the engine sent no log-probabilities of the tokens: look at the engine's log",
    "overlong": 'calls were cut at their token limit, and [credit] truncated is "mask": raise max_tokens in requests',
    "late": "the tokens are older than [staleness] eta allows",
    "images_unseen": "the episodes have images, and the trained model receives none",
    "image_missing": "images of the episodes cannot be read: the trainer's log names each",
    "image_placeholder": "the token that stands for images was sampled where no image is: ban it in requests",
    "redacted": "[redaction] found a secret in the tokens or their prompt: keep such texts out of what all prompts have, or"
    " narrow its rules",
    "orphaned": "versions that an older checkpoint has replaced sampled the tokens: later batches have none",
}
"""By the reason, which is the name of a `TokenFlag` or of a mask, in lower case."""

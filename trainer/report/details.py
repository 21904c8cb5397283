"""The details of a step that are written beside its figures: samples of its episodes, and a table of its tokens."""

from __future__ import annotations

from functools import cached_property

from trainer.data.batch import Batch
from trainer.data.details import DetailChoice
from trainer.report import samples, tokens
from trainer.report.files import samples_file, tokens_file
from trainer.report.samples import Decode
from trainer.settings import Settings

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


class Details:
    """The writer of one run's; `[report] samples_every` and `tokens_every` say of which steps."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def wanted(self, step: int) -> DetailChoice:
        """The parts of a step's batch that are kept for the report; steps are counted from 1."""
        report = self._settings.report
        groups = (report.samples_episodes + 1) // 2 if _is_due(step, report.samples_every) else 0
        return DetailChoice(groups, _is_due(step, report.tokens_every))

    def write(self, step: int, batch: Batch) -> None:
        """Writes the kept parts of a step's batch, each file at once. Blocks; raises OSError."""
        details, directory = batch.details, self._settings.run.dir
        if details.choice.groups:
            found = samples.samples_of(details, self._settings.report.samples_episodes, self._decode)
            samples.write(samples_file(directory, step), found)
        if details.choice.tokens:
            said = {"step": step, "buffer": batch.version, "version": batch.version + 1}
            tokens.write(tokens_file(directory, step), tokens.token_table(details), said)

    @cached_property
    def _decode(self) -> Decode:
        """By the tokenizer beside the model; without one, a text is its token ids."""
        path = self._settings.model.path
        if not any((path / name).exists() for name in _TOKENIZERS):
            return lambda ids: " ".join(map(str, ids))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and (step - 1) % every == 0

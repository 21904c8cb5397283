"""The details of a step that are written in addition to its figures: samples of its episodes, and a table of its tokens."""

from __future__ import annotations

from functools import cached_property

from trainer.config.settings import Settings
from trainer.data.batch import Batch
from trainer.data.details import DetailChoice
from trainer.report import samples, tokens
from trainer.report.files import delete_oldest, samples_file, tokens_file
from trainer.report.samples import Decode

_SAMPLED_EPISODES = 4
"""The best and the worst episode of each of two groups."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


class Details:
    """Writes the details of a run's steps, by `[report] samples_every` and `tokens_every`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def choice_of(self, step: int) -> DetailChoice:
        """Return the parts of a step's batch that are kept for the report; steps are counted from 1."""
        report = self._settings.report
        groups = _SAMPLED_EPISODES // 2 if _is_due(step, report.samples_every) else 0
        return DetailChoice(groups, _is_due(step, report.tokens_every))

    def write(self, step: int, batch: Batch) -> None:
        """Write the kept parts of a step's batch, each file atomically. Blocks. Raise OSError."""
        details, directory = batch.details, self._settings.run.dir
        if details.choice.groups:
            found = samples.samples_of(details, _SAMPLED_EPISODES, self._decode)
            samples.write(samples_file(directory, step), found)
        if details.choice.tokens:
            metadata = {"step": step, "batch": batch.version, "version": batch.version + 1}
            path = tokens_file(directory, step)
            tokens.write(path, tokens.token_table(details), metadata)
            delete_oldest(path, self._settings.report.tokens_mib * 2**20)

    @cached_property
    def _decode(self) -> Decode:
        """The model's tokenizer; without one, a text is its token ids."""
        path = self._settings.model.path
        if not any((path / name).exists() for name in _TOKENIZERS):
            return lambda ids: " ".join(map(str, ids))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and (step - 1) % every == 0

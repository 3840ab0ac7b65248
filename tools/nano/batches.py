"""Training batches, drawn on the device from token streams that lie there."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .tokenizer import END_OF_TEXT_ID

# Streams of short documents. Their windows begin where a document begins, because that is how the model is
# used: a prompt is the first thing it sees. Windows of text begin anywhere.
ALIGNED_STREAMS = ("tasks", "stories")


def rows_per_stream(mixture: Mapping[str, float], batch: int) -> dict[str, int]:
    """Whole rows whose shares are nearest to the mixture; the largest remainders are rounded up."""
    total = sum(mixture.values())
    exact = {name: batch * share / total for name, share in mixture.items()}
    rows = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: rows[name] - exact[name])[: batch - sum(rows.values())]:
        rows[name] += 1
    return rows


class Batches:
    """The batch of a step depends only on the seed and the step, so a resumed run sees the same ones."""

    def __init__(
        self,
        streams: Mapping[str, np.ndarray],
        rows: Mapping[str, int],
        sequence: int,
        seed: int,
        device: str,
    ) -> None:
        self.rows, self.seed = rows, seed
        self.tokens = {name: torch.from_numpy(streams[name].astype(np.int32)).to(device) for name in rows}
        self.last_start = {name: len(tokens) - sequence - 1 for name, tokens in self.tokens.items()}
        self.document_starts = {name: self.find_starts(name) for name in ALIGNED_STREAMS if name in rows}
        self.window = torch.arange(sequence + 1, device=device)
        self.generator = torch.Generator(device)

    def find_starts(self, name: str) -> Tensor:
        """Where documents begin, as far as a whole window follows."""
        ends = (self.tokens[name][: self.last_start[name]] == END_OF_TEXT_ID).nonzero().flatten()
        return torch.cat((ends.new_zeros(1), ends + 1))

    def draw(self, step: int) -> Tensor:
        """Token ids [batch, sequence + 1], the streams one after the other."""
        self.generator.manual_seed(self.seed * 1_000_000_007 + step)
        return torch.cat([self.draw_rows(name, rows) for name, rows in self.rows.items() if rows])

    def draw_rows(self, name: str, rows: int) -> Tensor:
        choices = self.document_starts.get(name)
        limit = self.last_start[name] + 1 if choices is None else len(choices)
        starts = torch.randint(limit, (rows,), generator=self.generator, device=self.window.device)
        if choices is not None:
            starts = choices[starts]
        return self.tokens[name][starts[:, None] + self.window].long()

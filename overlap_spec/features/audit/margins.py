"""By how much the logits would have to change for a request to draw another token than a given one.

A token is drawn if the filters keep it and its value, logit / T + noise, is the largest of those that are kept. So what
decides is how far apart two values are, and how far a column is from being kept or dropped. The margin is the smallest
change that makes a difference:

    margin = min( room of the token itself,
                least over all other columns of  max( value of the token - value of the column, - room of the column ) )

`room` is what keeps a column in, or with its sign changed what keeps it out. A margin is positive if the token is
the one that is drawn, and negative if it is not; that of a forbidden token is `FORBIDDEN`. All of it is in logits:
differences of logits / T, times T.
"""

import torch
import torch.nn.functional as F
from overlap_spec_kernels import gumbel
from torch import Tensor

from overlap_spec.sampling.context import Sampling

FORBIDDEN = -1e30  # in place of -inf, of which no difference can be taken
TINIEST = 1e-300


def margins_of(logits: Tensor, positions: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """The margin of `tokens`, one for each slot, drawn at `positions` from processed logits. Sync: never.

    Shapes: logits [B, V], positions, tokens [B] i64 -> [B] f64.
    """
    sampled = sampling.temperature > 0 if sampling.work.sampled else torch.zeros_like(tokens, dtype=torch.bool)
    temperature = torch.ones_like(tokens, dtype=torch.float64)
    if sampling.work.sampled:
        temperature = torch.where(sampled, sampling.temperature.clamp(min=1e-6), temperature)
    scaled = logits.double().clamp(min=2 * FORBIDDEN) / temperature[:, None]
    values = scaled
    if sampling.work.sampled:
        noise = gumbel(sampling.seed, positions, torch.arange(logits.shape[1], device=logits.device))
        values = scaled + noise.masked_fill(~sampled[:, None], 0.0)
    ahead = values.gather(1, tokens[:, None]) - values
    if sampling.work.filtered:
        room = _room(scaled, sampling).masked_fill(~sampled[:, None], torch.inf)
        own = room.gather(1, tokens[:, None]).squeeze(1)
        margin = torch.minimum(own, _least_ahead(torch.maximum(ahead, -room), tokens))
    else:
        margin = _least_ahead(ahead, tokens)
    forbidden = scaled.gather(1, tokens[:, None]).squeeze(1) * temperature <= FORBIDDEN
    return (margin * temperature).masked_fill(forbidden, FORBIDDEN)


def _least_ahead(ahead: Tensor, tokens: Tensor) -> Tensor:
    """Shapes: [B, V], tokens [B] -> [B]."""
    return ahead.scatter(1, tokens[:, None], torch.inf).amin(1)


def _room(scaled: Tensor, sampling: Sampling) -> Tensor:
    """By how much each column is within the filters; negative: outside; infinite: whatever changes.

    Shapes: [B, V] -> [B, V].
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    num_columns = scaled.shape[1]
    by_k = _to_edge(ordered, sampling.top_k.clamp(max=num_columns))
    by_min_p = ordered - (ordered[:, :1] + sampling.min_p[:, None].log())
    room = torch.minimum(torch.minimum(by_k, _room_in_mass(ordered, sampling.top_p)), by_min_p)
    return torch.empty_like(room).scatter_(1, order, room)


def _room_in_mass(ordered: Tensor, top_p: Tensor) -> Tensor:
    """The room of top_p, which keeps a column while the mass before it is less than top_p.

    To be kept or dropped, a column must take the place of another one, u: then the mass before u is before it. That is
    the larger of two changes: of its logit, as far as u's; and of the mass before u, as far as top_p (measured in
    log-odds, which change like a difference of logits). Along a row one of the two grows and the other shrinks, so the
    least is at one of the two columns where they cross. Shapes: [B, V], [B] -> [B, V].
    """
    p = ordered.softmax(-1)
    mass_room = _log_odds(top_p)[:, None] - _log_odds(p.cumsum(-1) - p)  # decreases along a row, as `ordered` does
    u = torch.searchsorted(-(mass_room + ordered), -ordered).clamp(min=1)
    beyond = F.pad(ordered, (0, 1), value=-torch.inf).gather(1, u)
    mass_beyond = F.pad(mass_room, (0, 1), value=-torch.inf).gather(1, u)
    kept = torch.minimum(ordered - beyond, mass_room.gather(1, u - 1))
    dropped = torch.maximum(ordered - ordered.gather(1, u - 1), mass_beyond)
    room = torch.where(mass_room > 0, kept, dropped)
    return room.masked_fill(top_p[:, None] >= 1, torch.inf)


def _to_edge(ordered: Tensor, num_kept: Tensor) -> Tensor:
    """How far a kept column is above the first one that is dropped, and how far a dropped one is below the last kept.

    The first `num_kept` columns are kept. The distance of a dropped column is negative.

    Shapes: [B, V], [B] i64 -> [B, V].
    """
    num_columns = ordered.shape[1]
    outside = ordered.gather(1, num_kept.clamp(max=num_columns - 1)[:, None])
    outside = outside.masked_fill((num_kept >= num_columns)[:, None], -torch.inf)
    inside = ordered.gather(1, (num_kept - 1).clamp(min=0)[:, None])
    rank = torch.arange(num_columns, device=ordered.device)
    return torch.where(rank < num_kept[:, None], ordered - outside, ordered - inside)


def _log_odds(mass: Tensor) -> Tensor:
    inside = mass.clamp(TINIEST, 1 - 2**-53)
    return inside.log() - (-inside).log1p()

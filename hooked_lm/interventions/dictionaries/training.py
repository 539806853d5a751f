"""Steps of the training of dictionaries: the loss, dead features, and checkpoints. One dictionary, or transcoders of layers.

Whatever is trained has `parts`: one dictionary, or a transcoder for each layer. The values of several layers are stacked, [row,
layer, width].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.engine.fingerprint import Digest
from hooked_lm.interventions.dictionaries.sae import SAE, frozen
from hooked_lm.interventions.dictionaries.stream import Stream, by_layer
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders, outputs, written
from hooked_lm.results import stored
from hooked_lm.results.scores import Scores

FORMAT = "hooked_lm.dictionary_training"
Config = SAE.Config | LayerTranscoders.Config
Inputs = Sequence[Float[Tensor, "row d_in"]]  # of each part
Outputs = Sequence[Float[Tensor, "row d_out"]]
Features = Sequence[Float[Tensor, "row d_sae"]]


@dataclass(frozen=True)
class TrainingConfig:
    """The training settings of a dictionary.

    Args:
        steps, vectors_per_step: the number of steps, and of vectors in each step.
        learning_rate: of Adam, with a warmup over the first 5% of the steps and a decay to zero over the last 20%.
        sparsity: the weight of the penalty, with a warmup over the first 10% of the steps. TopK and BatchTopK have no penalty.
        dead_after: a feature counts as dead after so many vectors without an activation.
        auxiliary: the weight of the auxiliary loss that revives dead features: the error of their reconstruction of the residual
            (Gao et al. 2024, arXiv:2406.04093). It affects only features with positive pre-activations that larger ones or a
            threshold suppress: those of TopK, BatchTopK and JumpReLU.
        resample_after: after so many vectors without an activation, a feature is resampled: it gets the reconstruction error of
            a vector, drawn with probability proportional to its squared error (after Bricken et al. 2023), and is on it as large
            as the error, but no larger than targets are on average. Only at the full learning rate, not during warmup and decay.
            None: never.
        seed: of the initial weights and of the order of vectors.
    """

    steps: int = 1000
    vectors_per_step: int = 512
    learning_rate: float = 1e-3
    sparsity: float = 1.0
    dead_after: int = 20_000
    auxiliary: float = 1 / 32
    seed: int = 0
    resample_after: int | None = 40_000

    def __post_init__(self) -> None:
        for name in ("steps", "vectors_per_step", "dead_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.resample_after is not None and self.resample_after < 1:
            raise ValueError(f"resample_after must be at least 1, or None, got {self.resample_after}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        for name in ("sparsity", "auxiliary"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def rate(self, step: int) -> float:
        """The factor of the learning rate in a step."""
        warm, falling = max(1, self.steps // 20), max(1, self.steps // 5)
        return min(1.0, (step + 1) / warm, (self.steps - step) / falling)

    def sparsity_at(self, step: int) -> float:
        """The weight of the penalty in a step."""
        return self.sparsity * min(1.0, step / max(1, self.steps // 10))


class DictionaryTraining:
    """A dictionary, or transcoders of layers, in training, with all state that a checkpoint needs."""

    def __init__(self, stream: Stream, cfg: Config, settings: TrainingConfig) -> None:
        self.settings, self.about = settings, stream.about()
        read, target = stream.fill(0)
        if "sha256" not in self.about:
            self.about = {**self.about, "sha256 of the first buffer": Digest().of((read, target)).hex()}
        configs = cfg.transcoders if isinstance(cfg, LayerTranscoders.Config) else (cfg,)
        _check_widths(read, target, cfg, configs)
        if target is read and any(one.skip_connection for one in configs):
            raise ValueError(
                "skip_connection is for transcoders, and the stream has one site: an autoencoder would copy its input"
            )
        if target is not read and any(one.subtract_b_dec for one in configs):
            raise ValueError(
                "b_dec belongs to the outputs and cannot be subtracted from other inputs: give subtract_b_dec=False"
            )
        reads, targets = by_layer(read), by_layer(target)
        self.scales = [_scale(x) for x in reads], [_scale(y) for y in targets]
        self.sae = at_sites(cfg, self.about.get("sites", [])).build(settings.seed).to(read.device)
        self.parts = self.sae.parts if isinstance(self.sae, LayerTranscoders) else [self.sae]
        with torch.no_grad():
            for sae, y, scale in zip(self.parts, targets, self.scales[1], strict=True):
                sae.b_dec.copy_(y.mean(0) * scale)
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=settings.learning_rate)
        shape = (len(self.parts), configs[0].d_sae)
        self.unseen_for: Int[Tensor, "part d_sae"] = torch.zeros(shape, dtype=torch.long, device=read.device)
        self.losses: list[float] = []
        self.place = (0, 0)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(
        self, read: Float[Tensor, "row *part d_in"], target: Float[Tensor, "row *part d_out"], number: int
    ) -> None:
        """Makes one training step."""
        settings, parts = self.settings, self.parts
        xs = [x * scale for x, scale in zip(by_layer(read), self.scales[0], strict=True)]
        ys = [y * scale for y, scale in zip(by_layer(target), self.scales[1], strict=True)]
        loss, hidden, features = self._objective(xs, ys, settings.sparsity_at(number))
        if bool((dead := self.unseen_for >= settings.dead_after).any()) and settings.auxiliary:
            loss = loss + settings.auxiliary * self._revived(xs, ys, hidden, features, dead)
        self.optimizer.zero_grad()
        loss.backward()
        lengths = [torch.nn.utils.clip_grad_norm_(sae.parameters(), 10.0 * sae.W_dec.shape[1] ** 0.5) for sae in parts]
        if not (bool(loss.isfinite()) and all(bool(length.isfinite()) for length in lengths)):
            raise FloatingPointError(
                f"the loss is {loss.item():.4g} in step {number}, or its gradient is not finite: lower the learning rate; "
                "nothing is returned"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.rate(number)
        self._keep_norms()
        self.optimizer.step()
        for sae in parts:
            sae.after_step()
        self.unseen_for += len(read)
        self.unseen_for[torch.stack([(values.detach() > 0).any(0) for values in features])] = 0
        if settings.resample_after is not None and settings.rate(number) == 1:
            dead = self.unseen_for >= settings.resample_after
            if bool(dead.any()):
                self._resample(dead, xs, self._missing(xs, ys, features), number)
        self.losses.append(loss.item())

    def _objective(
        self, xs: Inputs, ys: Outputs, sparsity: float
    ) -> tuple[Float[Tensor, ""], list[Tensor], list[Tensor]]:
        """The loss, with the pre-activations and the features of each part."""
        if isinstance(self.sae, LayerTranscoders):
            return self.sae.objective(xs, ys, sparsity)
        loss, hidden, features = self.sae.objective(xs[0], ys[0], sparsity)
        return loss, [hidden], [features]

    @torch.no_grad()
    def _missing(self, xs: Inputs, ys: Outputs, features: Features) -> list[Float[Tensor, "row d_out"]]:
        """The targets less their reconstructions."""
        return [y - made for y, made in zip(ys, outputs(self.parts, features, xs), strict=True)]

    def _revived(
        self, xs: Inputs, ys: Outputs, hidden: Features, features: Features, dead: Bool[Tensor, "part d_sae"]
    ) -> Float[Tensor, ""]:
        """The auxiliary loss: the error of the residual's reconstruction by the top dead features, up to half the width."""
        revived, reached = [], set()
        for place, (sae, before) in enumerate(zip(self.parts, hidden, strict=True)):
            n_best = min(int(dead[place].sum()), max(1, sae.cfg.width_out // 2))
            values, places = before.masked_fill(~dead[place], -torch.inf).topk(n_best, sorted=False)
            revived.append(torch.zeros_like(before).scatter(-1, places, values.relu()))
            reached |= {*range(place, place + sae.cfg.n_outputs)} if n_best else set()
        missing, made = self._missing(xs, ys, features), written(self.parts, revived)
        errors = [(missing[place] - made[place]).pow(2).sum(-1).mean() for place in sorted(reached)]
        return torch.stack(errors).sum()

    @torch.no_grad()
    def _resample(self, which: Bool[Tensor, "part d_sae"], xs: Inputs, missing: Outputs, number: int) -> None:
        """Resamples features: each detects a drawn vector, and writes its reconstruction error."""
        for place, (sae, x) in enumerate(zip(self.parts, xs, strict=True)):
            n = int(which[place].sum())
            if not n:
                continue
            error = torch.cat(list(missing[place : place + sae.cfg.n_outputs]), dim=-1)
            errors = error.pow(2).sum(-1).clamp_min(1e-12)
            seed = self.settings.seed * 1_000_003 + number + place * 7_919
            generator = torch.Generator().manual_seed(seed)
            rows = errors.cpu().multinomial(n, replacement=n > len(x), generator=generator).to(x.device)
            # no larger than a target's usual norm: else new features raise the error, by which the next ones are larger still
            sizes = errors[rows].sqrt().clamp_max(error.shape[1] ** 0.5)[:, None]
            centred = (x - x.mean(0))[rows]
            # activation on its vector: size
            readers = centred * sizes / centred.pow(2).sum(-1, keepdim=True).clamp_min(1e-12)
            middle = x.mean(0) - sae.b_dec if sae.cfg.subtract_b_dec else x.mean(0)
            sae.resample(which[place], readers.T, error[rows] / errors[rows].sqrt()[:, None], -readers @ middle)
            self._forget_moments(sae, which[place])
        self.unseen_for[which] = 0

    def _forget_moments(self, sae: SAE, which: Bool[Tensor, " d_sae"]) -> None:
        """Zeroes the optimiser's averages for the weights of some features."""
        for weight in sae.parameters():
            state = self.optimizer.state[weight] if weight is not sae.b_dec and weight is not sae.W_skip else None
            for average in (state["exp_avg"], state["exp_avg_sq"]) if state else ():
                (average.T if weight is sae.W_enc else average)[which] = 0

    @torch.no_grad()
    def _keep_norms(self) -> None:
        """Projects out of the gradient of the directions the component that would change their norm."""
        for sae in self.parts:
            W, gradient = sae.W_dec, sae.W_dec.grad
            assert gradient is not None
            gradient -= (gradient * W).sum(1, keepdim=True) * W / W.pow(2).sum(1, keepdim=True)

    # ---- the end, and checkpoints ------------------------------------------------------------------------------------

    def finished(self) -> tuple[SAE | LayerTranscoders, Scores]:
        """The dictionary for unscaled vectors, and the losses."""
        inputs, scales_out = self.scales
        for place, sae in enumerate(self.parts):
            sae.scale_inputs_(inputs[place], *scales_out[place : place + sae.cfg.n_outputs])
            norms = sae.W_dec.detach().norm(dim=1)
            sae.scale_features_(
                norms.mean().expand_as(norms)
            )  # one factor, so that the largest features stay the largest
        found = frozen(self.sae)
        losses = torch.tensor(self.losses)[:, None]
        about = {**self.about, **vars(self.settings), "dictionary": found.to_dict(), "of": "loss"}
        return found, Scores(losses, {"step": range(len(losses))}, about=about)

    def _metadata(self) -> dict[str, Any]:
        """The metadata that must be equal in a checkpoint and a training that resumes from it."""
        return {"dictionary": self.sae.to_dict(), "settings": vars(self.settings), "stream": self.about}

    def save(self, path: Path) -> None:
        """Writes a checkpoint."""
        tensors = {f"sae.{name}": weight for name, weight in self.sae.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{name}": value for name, value in state.items()}
        tensors |= {"unseen_for": self.unseen_for, "losses": torch.tensor(self.losses, dtype=torch.float64)}
        stored.write(path, FORMAT, tensors, {**self._metadata(), "place": self.place, "scales": self.scales})

    @stored.names_the_file
    def resume(self, path: Path) -> None:
        """Resumes from a checkpoint; ValueError for one of another training."""
        tensors, header = stored.read(path, FORMAT)
        for name, ours in self._metadata().items():
            theirs = header[name]
            if wrong := next((key for key, value in ours.items() if theirs.get(key) != value), None):
                raise ValueError(
                    f"{path} is a checkpoint of another training: {wrong} is {theirs.get(wrong)!r} there and {ours[wrong]!r} "
                    "here; give the settings of that training, or another directory"
                )
        self.sae.load_state_dict({name[4:]: value for name, value in tensors.items() if name.startswith("sae.")})
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.unseen_for = tensors["unseen_for"].to(self.unseen_for.device).view_as(self.unseen_for)
        self.losses, self.place = tensors["losses"].tolist(), tuple(header["place"])
        inputs, scales_out = header["scales"]  # numbers, in earlier versions
        self.scales = (inputs, scales_out) if isinstance(inputs, list) else ([inputs], [scales_out])


def at_sites(cfg: Config, sites: Sequence[str]) -> Config:
    """The config with the sites of a stream that knows them, of inputs and outputs, where it names none itself."""
    if not isinstance(cfg, LayerTranscoders.Config):
        return _of_one(cfg, sites)
    n = len(cfg.transcoders)
    pairs = zip(sites[:n], sites[n:], strict=True) if sites else [()] * n
    return replace(cfg, transcoders=tuple(_of_one(*both) for both in zip(cfg.transcoders, pairs, strict=True)))


def _of_one(cfg: SAE.Config, sites: Sequence[str]) -> SAE.Config:
    known: dict[str, Any] = dict(zip(("hook_point", "hook_point_out"), sites, strict=False))
    return replace(cfg, **{name: site for name, site in known.items() if getattr(cfg, name) is None})


def _check_widths(read: Tensor, target: Tensor, cfg: Config, configs: Sequence[SAE.Config]) -> None:
    """Raises ValueError for a stream of other widths, or another number of layers, than the dictionary has."""
    wanted = f"inputs of width {configs[0].d_in} and outputs of width {configs[0].width_out}"
    n_layers = [len(configs)] if isinstance(cfg, LayerTranscoders.Config) else []
    if [*read.shape[1:-1]] != n_layers or [*target.shape[1:-1]] != n_layers:
        has = f"{read.shape[1]} layers" if read.ndim == 3 else "one site"
        raise ValueError(
            f"the stream has vectors {[*read.shape]} and {[*target.shape]}, of {has}, and what is trained has "
            f"{len(configs) if n_layers else 'no'} layers: [row, layer, width] is for LayerTranscoders.Config, [row, width] for "
            "a dictionary"
        )
    if any((read.shape[-1], target.shape[-1]) != (one.d_in, one.width_out) for one in configs):
        raise ValueError(
            f"the stream has vectors of widths {read.shape[-1]} and {target.shape[-1]}, and the dictionary has {wanted}"
        )


def _scale(vectors: Float[Tensor, "row d"]) -> float:
    """The factor that scales vectors to a mean norm of sqrt(d)."""
    length = vectors.norm(dim=-1).mean().item()
    if not 0 < length < float("inf"):
        raise ValueError(
            f"the vectors have a mean norm of {length}, and training needs one that is positive and finite"
        )
    return vectors.shape[1] ** 0.5 / length

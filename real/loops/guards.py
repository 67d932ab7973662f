"""Finds loops that a plan cannot follow, such as those that do not clear gradients."""

import weakref
from typing import final

import torch
from torch import Tensor

from real.loops.bound_model import BoundModel
from real.loops.position import At, LoopPosition
from real.loops.shards import local_part
from real.programs.binding import trained_parameters
from simdist.errors import RunError


@final
class LoopGuards:
    """Raises an error where a loop would go wrong without a sign. It remembers versions of gradients and parameters."""

    def __init__(self, position: LoopPosition, model: BoundModel) -> None:
        self._position = position
        self._model = model
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.module.named_parameters()}
        self._trained = set(trained_parameters(model.module))
        self._frozen = [parameter for parameter in model.module.parameters() if not parameter.requires_grad]
        self._n_updated = self._count_updated()
        self._has_updated = False
        self._versions: list[int] = []  # of the parameters that the optimizer updates, after the backward pass
        self._first: Tensor | None = None  # the parameter whose gradient came first in this step
        self._n_arrived = 0  # how often its gradient came
        self._kept: tuple[weakref.ref[Tensor] | None, int] = None, 0  # its gradient in the last step, and version

    def check_alone(self, doing: str) -> None:
        """Raise an error if ranks share a copy of the model: the others wait for this rank in each of their passes."""
        shards = self._model.shards
        if shards and shards.ranks_per_copy > 1:
            raise RunError(
                f"{doing} of a model under fully_shard: the ranks that share a copy gather its parameters in every "
                f"pass, and would wait for this rank: do the pass with the loss multiplied by 0, or give all ranks "
                f"equally many batches"
            )

    def check_unshared(self, doing: str) -> None:
        """Raise an error if ranks share updates: others would wait for this rank's slice."""
        if self._model.shared:
            raise RunError(f"{doing} with shared updates: others would wait for the slice of a rank that is through")

    def check_gradient(self, parameter: Tensor) -> None:
        """Check a gradient that has arrived: it is dense, and the gradient of the step before was cleared."""
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise self._position.refusal(
                f"the gradient of {self._names.get(parameter)} is sparse, and those of a plan are dense: make its "
                f"layer with sparse=False"
            )
        at = self._position.at
        if self._first is None and at in (At.LOSS, At.NEXT):
            self._first = parameter
        if parameter is self._first:
            self._n_arrived += 1
            if at in (At.LOSS, At.BACKWARD) and self._position.is_first_pass:
                self._check_was_zeroed(gradient)

    def after_backward(self) -> None:
        """Remember the state of gradients and parameters before the update."""
        self._note_gradient()
        if not self._has_updated:
            self._versions = self._parameter_versions()

    def after_update(self) -> None:
        """Remember the state of gradients after an update, because clipping writes to them."""
        self._has_updated = True
        self._note_gradient()

    def end_step(self) -> None:
        """Begin to look for the first gradient of the next step."""
        self._first = None
        self._n_arrived = 0

    def check_unchanged(self) -> None:
        """Raise an error if parameters have changed, and the optimizer that was wrapped has never done a step."""
        if self._has_updated or self._versions == self._parameter_versions():
            return
        name = type(self._model.optimizer).__name__
        raise self._position.refusal(
            f"parameters have changed since backward() returned, but not in the step() of {name}: wrap the optimizer "
            f"whose step() changes them. Of an optimizer with two passes, such as SAM, wrap its base_optimizer, and "
            f"do the first pass in `with worker.no_sync():`"
        )

    def check_fresh(self) -> None:
        """Raise an error before an update if gradients have changed, and the update would not see that."""
        if self._model.rating.are_stale(self._position.update):
            raise self._position.refusal(
                "gradients have changed since backward() returned, and their trust ratios are of "
                "before; with Lars, neither clip gradients nor scale the loss"
            )
        if self._model.shared and self._model.shared.is_stale():
            raise self._position.refusal(
                "gradients have changed since backward() returned, and ranks update with slices of the mean, which "
                "are elsewhere; with shared_update, clip by worker.clip_grad_norm_(max_norm), and do not scale the loss"
            )

    def check_in_place(self) -> None:
        """Raise an error if the model is not as it was when it was wrapped."""
        if not self._model.binding.reclaim():
            raise self._position.refusal(
                "the model was moved, converted or wrapped again after real.wrap, so its parameters "
                "are no longer where they are synchronised; do that before, or after worker.close()"
            )
        if any(each.requires_grad for each in self._frozen) or self._has_others():
            raise self._position.refusal(
                "parameters were unfrozen, replaced or added after real.wrap, so they would not be "
                "synchronised; do that before. To train a layer later, freeze it after real.wrap, until then"
            )

    def _note_gradient(self) -> None:
        gradient = self._first.grad if self._first is not None else None
        self._kept = (None, 0) if gradient is None else (weakref.ref(gradient), local_part(gradient)._version)

    def _check_was_zeroed(self, gradient: Tensor | None) -> None:
        """Raise an error if the first gradient of a step was added to the gradient of the step before.

        In that case, only autograd has written to it since the last update. After a skipped update, only autograd has
        written to it since the last pass. Passes in `no_sync` may add to it if it is cleared before the plan's pass.
        """
        kept, version = self._kept
        if gradient is None or not kept or kept() is not gradient:
            return
        n_writers = self._model.shards.n_in_memory_of(gradient) if self._model.shards else 1
        if local_part(gradient)._version == version + self._n_arrived * n_writers:
            raise self._position.refusal(
                "gradients of the step before are still there, so they would be added up; call "
                "optimizer.zero_grad() in every step; to accumulate them, do all passes but a step's last in "
                "`with worker.no_sync():`"
            )

    def _has_others(self) -> bool:
        """Look for new parameters. The slower check of the module runs only before steps 0, 1, 2, 4, 8 and so on."""
        if self._count_updated() != self._n_updated:
            return True
        step = self._position.step
        if step & (step - 1):
            return False
        if self._model.shards:
            self._model.shards.reshard()  # after an evaluation, modules may still have gathered parameters
        return not self._trained.issuperset(trained_parameters(self._model.module))

    def _parameter_versions(self) -> list[int]:
        groups = self._model.optimizer.param_groups
        return [parameter._version for group in groups for parameter in group["params"]]

    def _count_updated(self) -> int:
        return sum(len(group["params"]) for group in self._model.optimizer.param_groups)

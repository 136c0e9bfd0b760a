"""Time steps of a spiking network in an input, and one of them alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.nn.arguments import sizes
from normscope.nn.masking import Lengths, valid

LAYOUTS = ("t b c ...", "b t c ...", "(t b) c ...")


def threshold_gain(layer: str, v_threshold: Any, alpha: Any) -> float:
    """alpha * v_threshold. Raises BadInput where one is not finite and above 0."""
    for name, value in (("v_threshold", v_threshold), ("alpha", alpha)):
        if not 0.0 < float(value) < float("inf"):
            raise BadInput(
                f"{layer} scales to the firing threshold, so {name} is a number above 0; got {value!r}. "
                + (
                    "alpha is 1, or 2 ** -0.5 on each branch of a sum."
                    if name == "alpha"
                    else "Usual is 1.0."
                )
            )
    return float(alpha) * float(v_threshold)


class TimeSteps(nn.Module):
    """Mixin of layers whose input has time steps ``t``, samples ``b`` and channels ``c``.

    ``layout`` is ``"t b c ..."``, ``"b t c ..."``, or ``"(t b) c ..."`` where both stand in one axis, all samples of
    the first step first; then ``steps`` says how many steps.
    """

    layout: str = LAYOUTS[0]
    steps: int | None = None
    _positions: tuple[int, int | None] = (0, None)
    """fewest and most axes after the channels"""

    def _set_layout(self, layout: str, steps: int | None) -> None:
        name = type(self).__name__
        if layout not in LAYOUTS:
            raise BadInput(
                f"{name} knows the layouts {', '.join(map(repr, LAYOUTS))} (t steps, b samples, c channels); got "
                f"{layout!r}. Move the axes of the input (x.movedim)."
            )
        joined = layout.startswith("(")
        if joined and steps is None:
            raise BadInput(
                f"{name} with the layout {layout!r} needs the number of time steps; got steps=None. Write steps=4."
            )
        self.layout = layout
        if steps is not None:
            (self.steps,) = sizes(name, "steps", steps, "Write steps=4.")

    @property
    def _joined(self) -> bool:
        return self.layout.startswith("(")

    @property
    def _rank(self) -> tuple[int, int | None]:
        """Fewest and most axes of an input."""
        low, high = self._positions
        before = 2 if self._joined else 3
        return before + low, None if high is None else before + high

    def _pattern(self, split: bool) -> tuple[str, int | None]:
        """Layout and number of steps, as a specification takes them.

        With steps and samples in one axis and ``split`` False they are all called samples.
        """
        if not self._joined:
            return self.layout, None
        return (self.layout, self.steps) if split else ("b c ...", None)

    def _check_axes(self, x: Tensor, channels: int, steps: int | None = None) -> None:
        """Raise BadInput where x has other axes, channels or (where given) steps."""
        name, (low, high) = type(self).__name__, self._rank
        if x.dim() < low or (high is not None and x.dim() > high):
            axes = f"{low} or more" if high is None else f"{low}" if low == high else f"{low} or {high}"
            raise BadInput(
                f"{name} takes an input {self.layout!r} of {axes} axes; got one of shape {tuple(x.shape)}. For one "
                "time step alone call step()."
            )
        at = 1 if self._joined else 2
        if x.shape[at] != channels:
            swapped = steps is not None and x.shape[at] == steps
            order = f"The number of steps comes first, {name}(steps, num_features), then that of channels; or say "
            raise BadInput(
                f"{name} was made for {channels} channels on axis {at}; got an input of shape {tuple(x.shape)}. "
                f"{order if swapped else 'Say '}where they are with layout=, or make the layer for that number."
            )
        time = 1 if self.layout == "b t c ..." else 0
        wrong = steps is not None and (x.shape[0] % steps if self._joined else x.shape[time] != steps)
        if wrong:
            raise BadInput(
                f"{name} was made for {steps} time steps on axis {time} of {self.layout!r}; got an input of shape "
                f"{tuple(x.shape)}. Make the layer for that number, or call step()."
            )

    def _counts(self, x: Tensor, mask: Tensor | None, lengths: Lengths | None) -> Tensor | None:
        """The elements that count, of ``mask`` and ``lengths`` (time steps of each sample); None where all do."""
        if mask is None and lengths is None:
            return None
        name = type(self).__name__
        if lengths is None or not self._joined:
            time = 1 if self.layout == "b t c ..." else 0
            return valid(name, x, mask, lengths, samples=1 - time, time=time)
        apart = x.reshape(self.steps or 1, -1, *x.shape[1:])
        inside = valid(name, apart, None, lengths, samples=1, time=0).flatten(0, 1)
        return inside if mask is None else valid(name, x, mask, None) & inside

    def _one_step(self, x: Tensor) -> Tensor:
        """One step (b, c, ...) as a sequence of one."""
        if self._joined:
            y: Tensor = self(x)
            return y
        time = 1 if self.layout == "b t c ..." else 0
        y = self(x.unsqueeze(time))
        return y.squeeze(time)

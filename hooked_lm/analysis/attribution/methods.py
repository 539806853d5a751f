"""The methods of attribution: what estimates the effects of exchanging values at sites from gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hooked_lm.analysis.attribution.atp import atp_star
from hooked_lm.analysis.attribution.backward_rules import GIM, PLAIN, RELP, BackwardRules
from hooked_lm.analysis.attribution.gradient_runs import Estimates, GradientRun
from hooked_lm.analysis.attribution.integrated import ig_activations, ig_inputs, inputs
from hooked_lm.hooks import HookedRootModule


@dataclass(frozen=True)
class Method:
    """A function that estimates effects from a run and a number of steps; `also` gives further sites whose new values it
    needs, besides those to which it attributes. `rules` are those of its backward passes; None: it takes no others than
    derivatives."""

    estimate: Callable[[GradientRun, int], Estimates]
    also: Callable[[HookedRootModule, Sequence[str]], Sequence[str]] = lambda model, sites: ()
    copies: bool = False  # whether it runs several copies of the prompts
    in_steps: bool = False  # whether it reads scores and patterns
    rules: BackwardRules | None = PLAIN


def gradient(run: GradientRun, steps: int) -> Estimates:
    """The gradient of the base run times the difference; `steps` is not used."""
    tape = run.tape()
    values, gradients = tape.values, run.gradients(tape)
    return Estimates(
        tape.scores.detach(), {site: run.product(site, gradients[site], values[site]) for site in run.sites}
    )


METHODS: Mapping[str, Method] = {
    "gradient": Method(gradient),
    "ig-inputs": Method(ig_inputs, inputs, copies=True),
    "ig-activations": Method(ig_activations, copies=True),
    "atp*": Method(atp_star, in_steps=True, rules=None),
    "relp": Method(gradient, rules=RELP),
    "gim": Method(gradient, rules=GIM),
}

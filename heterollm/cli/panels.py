"""Panels of options in the help of a command, and the options that its short help shows."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperCommand

HELP: Final = ("-h", "--help")
"""Names of the short help."""

PANELS: Final[Mapping[str, str]] = {
    "Model": "precision group_size asymmetric scales calibration lora context kv_bits experts_gib "
    "calibrated numerics",
    "Sampling": "max_new_tokens max_tokens temperature top_k top_p min_p repetition_penalty "
    "presence_penalty frequency_penalty seed stop json_schema grammar top_logprobs",
    "Device": "device soc gpu_threads npu_threads threads power sync allow_slow allow_fallback profile "
    "gpu_load what_if every_form",
    "Plan": "plan plan_for length_policy in_flight techniques keep keep_by score_buckets estimator overflow "
    "speculative guesses forbid gpu_share npu_gib energy_weight histogram build_budget pruned "
    "outlier_share imbalance head_imbalance head_pipeline",
}
"""Options by panel, in the order of the help; others follow under "Options"."""

SHORT: Final[Mapping[str, str]] = {
    "generate": "precision context max_new_tokens temperature top_p json_schema device plan speculative "
    "file system raw as_json",
    "chat": "precision lora context kv_bits max_new_tokens temperature top_p seed device profile plan "
    "speculative system",
    "serve": "precision context temperature max_tokens device plan speculative host port name api_key "
    "sessions_gib live",
    "plan": "precision context device profile plan techniques prompt decode explain steps "
    "output html as_json",
    "simulate": "soc gpu_load what_if sync plan techniques prompt decode timeline explain form output "
    "as_json",
    "bench": "precision device threads plan techniques engine prompt decode depth repetitions form output "
    "saved",
}
"""Options in the short help of a command; ``--help-all`` shows the rest. Other commands show all."""

ALL: Final = "heterollm.cli.help_all"
"""Key of a context whose help shows all options."""


class PanelCommand(TyperCommand):
    """A command whose help has panels, and a short form where :data:`SHORT` names one."""

    _help_all: Any = None

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - of typer's own click
        """Return the parameters, ``--help`` and ``--help-all``."""
        params = super().get_params(ctx)
        if self.name not in SHORT:
            return params
        if self._help_all is None:
            self._help_all = copy.copy(params[-1])
            self._help_all.name, self._help_all.opts = "help_all", ["--help-all"]
            self._help_all.help = "Show all options and exit."
            self._help_all.callback = _show_all
        return [*params, self._help_all]

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write arguments and panels of options, which typer itself writes only in rich's boxes."""
        names = SHORT.get(self.name or "")
        if names is None:
            super().format_options(ctx, formatter)
            return
        short = {*names.split(), "help", "help_all"}
        panels = {name: panel for panel, names in PANELS.items() for name in names.split()}
        rows = defaultdict[str, list[tuple[str, str]]](list, {panel: [] for panel in ("Arguments", *PANELS)})
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is None:  # a hidden option
                continue
            if param.param_type_name == "argument":
                rows["Arguments"].append(row)
            elif ctx.meta.get(ALL) or param.name in short:
                rows[param.rich_help_panel or panels.get(param.name, "Options")].append(row)
        for panel, lines in rows.items():
            if lines:
                with formatter.section(panel):
                    formatter.write_dl(lines)


def _show_all(ctx: Any, _: object, value: object) -> None:  # noqa: ANN401
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()

"""Plot predicted against measured times."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from djinn.errors import ConfigurationError
from djinn_costs.roofline.calibration.validate import Comparison, Validation


def check_drawable() -> None:
    """Raise an error at once if matplotlib is not installed, instead of after minutes of measurements.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigurationError("`--plot` needs matplotlib, which is not installed: `pip install matplotlib`")


def draw(validation: Validation, file: Path) -> None:
    """Draw a point for each program, with a colour for each kind of program.

    Correct predictions lie on the diagonal. Dotted lines mark an error of 20%.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    by_kind: dict[str, list[Comparison]] = {}
    for compared in validation.comparisons:
        by_kind.setdefault(compared.name.partition(",")[0], []).append(compared)
    figure = Figure(figsize=(9.5, 7.0), layout="constrained")
    axes = figure.add_subplot(aspect="equal", xscale="log", yscale="log", xlabel="measured", ylabel="predicted")
    for kind, members in by_kind.items():
        axes.plot([c.measured for c in members], [c.predicted for c in members], "o", alpha=0.75, label=kind)
    for factor, style in ((1.0, "-"), (1.2, ":"), (1 / 1.2, ":")):
        axes.axline((1e-3, 1e-3 * factor), (1.0, factor), color="0.35", linewidth=0.8, linestyle=style)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter("s"))
    axes.grid(color="0.9")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    count, error, r2 = len(validation.comparisons), validation.median_error, validation.r2_log
    axes.set_title(
        f"Predicted and measured time of {count} programs: median error {error:.0%}, R² of log time {r2:.3f}"
    )
    with rc_context({"svg.fonttype": "none"}):  # searchable text
        figure.savefig(file, format="svg", metadata={"Date": None})

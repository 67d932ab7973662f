"""Pictures: the speed-up table as bars, and what every stream did as a timeline; and tables in pages.

Functions of pictures return a `matplotlib.figure.Figure` that no global state knows about; nothing is shown. In a
notebook the figure is the value of a cell; otherwise `save` writes it.
"""

from simdist.report.figures import save
from simdist.report.markdown import insert_tables, markdown_table, page_command, print_tables, write_tables
from simdist.report.speedup import speedup_figure
from simdist.report.timeline import timeline_figure

__all__ = [
    "insert_tables",
    "markdown_table",
    "page_command",
    "print_tables",
    "save",
    "speedup_figure",
    "timeline_figure",
    "write_tables",
]

"""Output of a program of many ranks: log records with ranks, a progress bar and metrics of rank 0."""

from echelon.logging.metrics import MetricsWriter
from echelon.logging.progress import progress
from echelon.logging.rank_filter import RankFilter

__all__ = ["MetricsWriter", "RankFilter", "progress"]

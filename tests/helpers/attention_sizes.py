"""Small sizes of attention in profiles, and the records of their tasks."""

from heterollm.model.known import ModelSize
from heterollm.profiler.measure import sparse_cases

SIZES = ((64, 256), (64, 512), (128, 512))
MODEL = ModelSize(256, 512, 1, 8, 4, 320, True, 32, 2048).shape("tiny")


def take_small_sizes(monkeypatch):
    monkeypatch.setattr(sparse_cases, "SIZES", SIZES)
    monkeypatch.setattr(sparse_cases, "QUICK_SIZES", SIZES[:2])


def measured(tasks):
    """Return the records of tasks by key, which are those that the tasks announce; none failed."""
    records = [record for task in tasks for record in task.run()]
    assert [record.key for record in records] == [key for task in tasks for key in task.keys]
    assert not [record.error for record in records if record.failed]
    return {record.key: record for record in records}

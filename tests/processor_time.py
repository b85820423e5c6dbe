"""A plugin of pytest: the processor time of each test, of it and the processes that it started.

`PROCESSOR_TIME=FILE PYTHONPATH=tests pytest -p processor_time` adds a line of JSON to the file for each test;
`python tests/processor_time.py FILE` adds them up by folder and file, and names the dearest tests.
"""

import collections
import json
import os
import sys
from pathlib import Path

import pytest


def now_s():
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    begin = now_s()
    result = yield
    with Path(os.environ["PROCESSOR_TIME"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": item.nodeid, "seconds": round(now_s() - begin, 2)}) + "\n")
    return result


def show(path):
    rows = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    parts = (
        lambda test: "all",
        lambda test: test.split("::")[0].rpartition("/")[0],
        lambda test: test.split("::")[0],
        lambda test: test,
    )
    for part in parts:
        spent = collections.Counter()
        for row in rows:
            spent[part(row["test"])] += row["seconds"]
        for name, seconds in spent.most_common(30):
            print(f"{seconds:8.1f} {name}")
        print()


if __name__ == "__main__":
    show(sys.argv[1])

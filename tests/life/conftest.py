"""Fixtures of the life-cycle tests."""

import pytest


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def launched():
    """Starts commands and makes sure that the test leaves none behind."""
    started = []

    def start(make, *arguments):
        started.append(make(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.clean_up()

"""Traces on a device are the store's, in any order, whether they fit or not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dustin_profile.traces.resident import AHEAD, Resident, resident
from dustin_profile.traces.windows import Windows


class Disk:
    """Counts what is read of it."""

    def __init__(self, count: int) -> None:
        self.read: Counter[int] = Counter()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Windows:
        if index == 90:
            raise OSError("damaged")
        self.read[index] += 1
        rows = torch.full((2, 8), float(index))
        return Windows(str(index), torch.tensor([4, 8]), rows, rows[:, 0], rows.half()[None], rows.half()[None])


SIZE = sum(value.nbytes for value in vars(Disk(1)[0]).values() if isinstance(value, torch.Tensor))


def test_a_cpu_takes_the_documents_as_they_are() -> None:
    disk = Disk(3)
    assert resident(disk, torch.device("cpu")) is disk


@pytest.mark.parametrize(("room", "reads"), [(20, 1), (6, 2), (0, 2)])
def test_what_fits_is_read_once_and_the_rest_for_every_pass(room: int, reads: int) -> None:
    disk = Disk(20)
    documents = Resident(disk, torch.device("cpu"))
    documents.room = room * SIZE
    for _ in range(2):
        for index in range(len(documents)):
            windows = documents[index]
            assert windows.document == str(index)
            assert torch.equal(windows.truth, torch.full((2, 8), float(index)))
    assert [disk.read[index] for index in range(20)] == [1] * room + [reads] * (20 - room)


def test_no_more_is_read_ahead_than_said_and_nothing_twice_at_once() -> None:
    disk = Disk(100)
    documents = Resident(disk, torch.device("cpu"))
    assert documents[10].document == "10"
    documents[11]
    assert set(disk.read) <= set(range(10, 11 + AHEAD)) and max(disk.read.values()) == 1


def test_a_damaged_file_is_the_fault_of_its_own_document() -> None:
    documents = Resident(Disk(100), torch.device("cpu"))
    for index in range(80, 90):
        assert documents[index].document == str(index)
    with pytest.raises(OSError, match="damaged"):
        documents[90]

"""A rank as a process: joins a group and meets the others again and again, saying so each time.

Started as `python -m tests.helpers.rank_process RANK SIZE RENDEZVOUS`. Knows no model.
"""

from __future__ import annotations

import sys

import torch

from workers.parallel import open_group


def main() -> None:
    rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    group = open_group(rank, size, rendezvous, torch.device("cpu"), ordered=True)
    while True:
        group.exchange(torch.zeros(1, dtype=torch.int64))
        print("met", flush=True)


if __name__ == "__main__":
    main()

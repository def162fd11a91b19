"""Entry of the frontend process. Started by the launcher, which it obeys; see `frontend.process`."""

from __future__ import annotations

from pagemill.child import enter
from pagemill.config import FrontendConfig


def main() -> None:
    child = enter("frontend", FrontendConfig)
    from frontend.process import run  # after `enter`: the process is named and watched before it loads anything

    run(child)


if __name__ == "__main__":
    main()

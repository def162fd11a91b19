"""The scheduler process: a pure core (`core`) and a thin shell (`process`)."""

"""The frontend process: HTTP, text and tokens. Started by the launcher as `python -m frontend`."""

"""Where KV is, as ids and counts; the bytes are the workers'."""

"""Where KV is: ids and counts here and in `tiers`, bytes only in `arena` and `tiers`."""

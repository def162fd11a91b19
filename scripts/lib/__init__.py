"""What several scripts share. Not part of the product; not in the wheel."""

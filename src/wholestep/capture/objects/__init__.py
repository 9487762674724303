"""The user's objects: found, swapped for fakes while a step is traced, and put back."""

"""Running passes: contracts, order, verification, replay, dumps."""

"""Integer ranges, both ends included."""


def merge(ranges):
    """Sorted ranges with the overlapping ones joined.

    >>> merge([(5, 9), (1, 6)])
    [(1, 9)]
    """
    ordered = sorted(ranges)
    merged = [ordered[0]]
    for start, end in ordered[1:]:
        last_start, last_end = merged[-1]
        if start < last_end:
            merged[-1] = (last_start, end)
        else:
            merged.append((start, end))
    return merged

"""The bytes that the stages of a pipeline keep for their backward passes."""


def kept_bytes(stages, number, micro_batch):
    """Return the bytes that `ReplicaStages` keeps of a micro-batch for a segment, besides the segment's arguments."""
    kept = stages._kept.get((number, micro_batch))
    if kept is None:
        return 0
    taken = kept.values[len(stages._staged.segments[number].inputs) :]
    arrays = [array for array in (*taken, *(kept.residuals or {}).values()) if array is not None]
    return sum({id(array): array.nbytes for array in arrays}.values())

"""FlashMLA's schedule as it writes it, so that the guard can be tested without it."""

import numpy as np

from attnlib.core.schedule.flashmla import BLOCK

REQUEST_BLOCKS = 5
"""What starting a request counts for, in blocks (fixed_overhead_num_blocks)."""


def schedule_words(seq_lens: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """What FlashMLA writes for `seq_lens` [bs] tokens: tiles [parts, 8] and splits [bs + 1] int32.

    Parts get equal shares of blocks, in the order of requests. What nothing reads is 0: the
    padding, and all but the requests of a part without work.
    """
    lens = np.asarray(seq_lens, np.int64)
    blocks = np.maximum(-(-lens // BLOCK), 1)
    share = -(-int((blocks + REQUEST_BLOCKS).sum()) // parts) + REQUEST_BLOCKS
    tiles = np.zeros((parts, 8), np.int32)
    sums = [0]
    request = block = split = 0
    for part in tiles:
        part[:2] = request, request - 1
        if request == len(lens):
            continue
        first = request
        first_block = block
        first_split = split
        room = share
        while request < len(lens) and room >= blocks[request] - block + REQUEST_BLOCKS:
            room -= blocks[request] - block + REQUEST_BLOCKS
            sums.append(sums[-1] + split + 1)
            request = request + 1
            block = 0
            split = 0
        if request < len(lens) and room > REQUEST_BLOCKS:
            block = block + room - REQUEST_BLOCKS
            split = split + 1
        last = request if block else request - 1
        end = block or min(lens[last], blocks[last])  # an empty request has no block to read
        begins_inside = first_block > 0
        ends_inside = 0 < end < blocks[last]
        if first == last:
            begins_inside = ends_inside = begins_inside or ends_inside
        part[1:7] = last, first_block, end, first_split, begins_inside, ends_inside
    return tiles, np.array(sums, np.int32)

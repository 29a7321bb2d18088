"""The limits of what an executor accepts in one message, known to both ends: the client refuses an op that exceeds one.

A message that exceeds one all the same fails its submission alone.
"""

from __future__ import annotations

from typing import Final

DIMENSIONS: Final = 128  # of a tensor; PyTorch's kernels reduce 64 at most, and make, move and view more
TEXT: Final = 1 << 16  # characters of a string among the arguments of an op
SMALLEST_INTEGER: Final = -(1 << 63)  # MessagePack has 64 bits, signed or not
LARGEST_INTEGER: Final = (1 << 64) - 1
DEEPEST_LIST: Final = 16  # lists in lists; PyTorch has ops that take lists of lists, and none beyond

# Kernels take a step, or call themselves, for each of these: beyond the limits they would run for ever or overflow the stack.
SHIFTS: Final = 1024  # of one `roll`
DEGREE: Final = 1 << 16  # of a polynomial
PIECES: Final = 1 << 16  # of a `chunk` or `tensor_split`
LAYERS: Final = 1 << 10  # of a recurrent network

ARGUMENTS_OF_AN_OP: Final = 1 << 20  # operands, scalars and results of one op
INSTRUCTIONS: Final = 1 << 18  # of a template
ARGUMENTS: Final = 1 << 22  # of all instructions of a template together: a form counts each time that it is used
# A client splits templates beyond this many arguments (a single op may exceed it): with a few dozen bytes each, a message stays
# far below the limit of a frame.
ARGUMENTS_SENT: Final = 1 << 18

HANDLES: Final = 1 << 21  # in one list: enough to free a large session; decoding takes about a second
HANDLES_SENT: Final = 1 << 20

CUSTOM_OPERATORS: Final = 4096  # that an executor offers
SCHEMA: Final = 4096  # characters of the schema of one

TEMPLATES: Final = 1024  # that both ends keep, the most recently used
DECISIONS: Final = 8  # lines about what a plan decided
TEMPLATE_INSTRUCTIONS: Final = 1 << 18  # of these together

BLOBS_ASKED: Final = 4096  # tensors of which a client asks at a time whether the executor has their bytes
STOPS: Final = 1024  # submissions that one message stops
STORED_TENSORS: Final = 1 << 18  # at one address
STORED_NAME: Final = 1024  # characters of the name of one
STORED_ADDRESS: Final = 4096  # characters of their address
SMALL_FILES: Final = 256  # of a model's folder, such as its configuration and its tokenizer
SMALL_FILES_BYTES: Final = 48 << 20  # of these together
STATE_PARTS: Final = 1 << 20  # of a session's state that goes to another executor

FAILURE_TEXT: Final = 4000  # characters of an error message that travel
FAILURE_TEXTS: Final = 1 << 20  # of all in one reply; the others have their beginnings
FAILURE_BEGINNING: Final = 100

HEAD_BYTES: Final = 64 << 20  # of a frame: its message
BODY_BYTES: Final = 1 << 30  # of a frame: its buffers together
BUFFERS: Final = 1 << 16  # of a frame, and tensors that come back at a time

# Limits of the receive queue of a connection. The last frame may exceed the bytes.
# AHEAD: the receiver stops reading, and the network slows the sender. A client that waits for a reply has sent fewer frames.
# BACKLOG: the receiver waits for a later frame, so more queued frames are a protocol error.
AHEAD_FRAMES: Final = 1024
AHEAD_BYTES: Final = 16 << 20
BACKLOG_FRAMES: Final = 4096
BACKLOG_BYTES: Final = 256 << 20

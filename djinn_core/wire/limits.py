"""Limits of an executor for one message, known to both ends. The client refuses an op that exceeds a limit.

A message that exceeds a limit fails only its own submission.
"""

from __future__ import annotations

from typing import Final

DIMENSIONS: Final = 128  # dimensions of a tensor; PyTorch's kernels reduce at most 64, but create, copy and view more
TEXT: Final = 1 << 16  # characters of a text argument of an op
MIN_INTEGER: Final = -(1 << 63)  # MessagePack integers have 64 bits, signed or unsigned
MAX_INTEGER: Final = (1 << 64) - 1
DEEPEST_LIST: Final = 16  # nesting depth of lists; PyTorch's ops take lists of lists at most

# Kernels loop or recurse over these: beyond the limits they would run forever or overflow the stack.
SHIFTS: Final = 1024  # shifts of one `roll`
DEGREE: Final = 1 << 16  # degree of a polynomial
PIECES: Final = 1 << 16  # pieces of a `chunk` or `tensor_split`
LAYERS: Final = 1 << 10  # layers of a recurrent network

ARGUMENTS_OF_AN_OP: Final = 1 << 20  # operands, scalars and results of one op
INSTRUCTIONS: Final = 1 << 18  # instructions of a template
ARGUMENTS: Final = 1 << 22  # arguments of all instructions of a template; a form counts for each use
# A client splits templates beyond this many arguments (a single op may exceed it): with a few dozen bytes each, a message stays
# far below the limit of a frame.
ARGUMENTS_SENT: Final = 1 << 18

HANDLES: Final = 1 << 21  # handles in one list: enough to free a large session; decoding takes about a second
HANDLES_SENT: Final = 1 << 20

CUSTOM_OPERATORS: Final = 4096  # custom ops that an executor offers
SCHEMA: Final = 4096  # characters of a custom op's schema

TEMPLATES: Final = 1024  # templates that both ends cache, by least recent use
DECISIONS: Final = 8  # lines about decisions of a plan
TEMPLATE_INSTRUCTIONS: Final = 1 << 18  # instructions of these together

BLOBS_ASKED: Final = 4096  # tensors in one query for known bytes
STOPS: Final = 1024  # submissions that one message cancels
STORED_TENSORS: Final = 1 << 18  # tensors at one address
STORED_NAME: Final = 1024  # characters of the name of a weight
STORED_ADDRESS: Final = 4096  # characters of a weight address
SMALL_FILES: Final = 256  # bytes of small files of a model's folder, such as configuration and tokenizer
SMALL_FILES_BYTES: Final = 48 << 20  # bytes of these together
STATE_PARTS: Final = 1 << 20  # bytes of a session's state that moves to another executor

FAILURE_TEXT: Final = 4000  # characters of an error message
FAILURE_TEXTS: Final = 1 << 20  # characters of all error messages in one reply; later ones are cut
FAILURE_BEGINNING: Final = 100

HEAD_BYTES: Final = 64 << 20  # bytes of a frame's head: its message
BODY_BYTES: Final = 1 << 30  # bytes of all buffers of a frame
BUFFERS: Final = 1 << 16  # buffers of a frame, and tensors in one reply

# Limits of the receive queue of a connection. The last frame may exceed the bytes.
# AHEAD: the receiver stops reading, and the network slows the sender. A client that waits for a reply has sent fewer frames.
# BACKLOG: the receiver waits for a later frame, so more queued frames are a protocol error.
AHEAD_FRAMES: Final = 1024
AHEAD_BYTES: Final = 16 << 20
BACKLOG_FRAMES: Final = 4096
BACKLOG_BYTES: Final = 256 << 20

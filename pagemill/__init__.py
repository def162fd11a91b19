"""Pagemill: a multi-process LLM server whose speciality is long contexts under memory pressure.

This package is the contract that the processes share; it knows none of them.
"""

__version__ = "0.1.0"

#: Changes whenever a message changes shape. Processes of one server always come from one distribution,
#: so a mismatch in the handshake means a broken installation and is refused.
PROTOCOL_VERSION = 2

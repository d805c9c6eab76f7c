"""What can go wrong between two machines."""


class TransportError(Exception):
    """Base of all errors of this package."""


class UcxError(TransportError):
    """A UCX call failed; the message names the call and UCX's own words."""


class DeadlineError(TransportError):
    """Something did not happen in the time it was given."""


class PeerLostError(TransportError):
    """The other side is gone: it fell silent, closed the connection, or died."""


class RefusedError(TransportError):
    """The other side answered, and said no; the message is its reason."""


class OrderFailedError(TransportError):
    """A teacher could not serve an order; the message is the error that it met."""


class ProtocolError(TransportError):
    """Bytes that arrived are not what the protocol says they must be."""

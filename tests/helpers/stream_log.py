"""A stand-in for a place among the streams of a device."""

import threading

from echelon.backends.host_copies import StreamScope


class StreamLog(StreamScope):
    """Writes down what happens in which thread."""

    def __init__(self, log):
        self.log = log
        self.caller = threading.get_ident()

    def queued(self, function):
        result = function()
        self.log.append(("queued", threading.get_ident() == self.caller))
        return result

    def join(self):
        self.log.append(("joined", threading.get_ident() == self.caller))

"""Codecs: compression of chunks, the adaptive choice of the codec of a tier, and the threads that encode."""

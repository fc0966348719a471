"""The report of runs: what their records and events say, as one HTML file, as JSON, and live from a server."""

"""Translation over HTTP: what is asked and answered (`messages.py`), who waits (`batches.py`), HTTP (`app.py`)."""

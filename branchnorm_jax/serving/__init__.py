"""Translation over HTTP: requests and answers (`messages.py`), queueing (`batches.py`), HTTP routes (`app.py`)."""

"""Loading, validation and tokenization of data sets."""

"""A local web page about all runs below a folder: `pulsetrain serve`. It only reads them."""

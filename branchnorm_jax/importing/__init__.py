"""Import of models that other toolkits trained. Each family is a module that reads a folder into an `Imported`."""

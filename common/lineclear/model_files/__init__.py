"""The files of a model as both processes see them: fingerprints, and checks of a directory."""

"""What can stop an export, by stage; every one means that nothing was published.

ExportError
  CalibrationError   the file of calibration inputs is not one
  ConversionError    torch.onnx.export gave up
  InspectionError    the graph is not what the contract promises
  ParityError        the graph does not compute what the layer computes, or its precision costs too much
  PublicationError   the version exists, or the folder cannot be written
"""


class ExportError(Exception):
    """An export that published nothing. The message says what, where, got, want."""


class CalibrationError(ExportError):
    """The calibration input cannot be read, or does not fit the layer."""


class ConversionError(ExportError):
    """torch could not turn the layer into a graph."""


class InspectionError(ExportError):
    """The graph breaks the contract of `export.signature`."""


class ParityError(ExportError):
    """ONNX Runtime's answer is too far from torch's or from the float64 oracle's, on the grid or on the calibration."""


class PublicationError(ExportError):
    """The artefact could not be put in its place."""

"""What every API of the plane does with a request: bodies, answers, refusals."""

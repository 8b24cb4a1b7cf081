"""`anabranch view`: a recorded run in the browser."""

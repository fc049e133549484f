"""The app under test in Flask."""

from __future__ import annotations

from flask import Flask, Response, request
from tests.http.apps.kitchen import boundary, cook, open_receiver

from effectonce.http.flask import Idempotency

METHODS = ["GET", "POST", "PATCH", "PUT", "DELETE"]

app = Flask(__name__)


@app.route("/<rules>/<what>", methods=METHODS)
def handle(rules: str, what: str) -> Response:
    dish = cook(what, request.args["n"], request.get_data())
    return Response(dish.body if dish.pieces is None else dish.pieces, dish.status, dish.headers)


Idempotency(app, open_receiver(), **boundary())

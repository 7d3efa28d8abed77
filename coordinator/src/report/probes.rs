//! `/metrics`, `/healthz` and `/readyz`.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;

use super::Metrics;

/// `/metrics`, `/healthz` and `/readyz`.
pub fn routes(metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/metrics", get(text))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .with_state(metrics)
}

async fn text(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    let kind = [(
        header::CONTENT_TYPE,
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
    )];
    match metrics.text() {
        Ok(body) => (StatusCode::OK, kind, body),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, kind, error.to_string()),
    }
}

async fn ready(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    if metrics.is_ready() {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "starting")
    }
}

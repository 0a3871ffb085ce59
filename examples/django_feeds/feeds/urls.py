"""The addresses."""

from django.urls import path

from . import views

urlpatterns = [
    path("feeds/<int:feed_id>/import/", views.queue_import),
    path("feeds/<int:feed_id>/preview/", views.preview),
]

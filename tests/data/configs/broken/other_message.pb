
tensorflow